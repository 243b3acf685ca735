"""`DistributedOptimizer`: any torch optimizer, fed with gradients that are means over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpicomp import world as _world
from mpicomp.auto import Auto, Autopilot, as_auto, without_auto
from mpicomp.compress.base import PRIVATE_SLOTS, Compressor
from mpicomp.compress.rules import Compression, alone, assign, resolve
from mpicomp.engine import Engine
from mpicomp.replicate import broadcast_optimizer_state, broadcast_parameters
from mpicomp.step import Observer

_MEMORY = "mpicomp"  # the key in ``state_dict()`` under which compressors' memory is kept


def _delegated(name: str) -> Any:
    """An attribute that lives in the wrapped optimizer, also when it is assigned."""

    def get(self: DistributedOptimizer) -> Any:
        return getattr(self.optimizer, name)

    def assign(self: DistributedOptimizer, value: Any) -> None:
        setattr(self.optimizer, name, value)

    def delete(self: DistributedOptimizer) -> None:
        delattr(self.optimizer, name)

    return property(get, assign, delete)


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters have mean gradients when ``backward()`` returns.

    The optimizer that is wrapped stays the user's: its class, state, parameter groups and hooks
    are used through this object, so schedulers, gradient scalers and clipping work unchanged.
    Building one is collective. With one rank it does nothing but delegate,
    unless the compressor applies momentum.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        named_parameters: names for the parameters, as from ``model.named_parameters()``.
        compression: a name, a spec such as ``"topk:density=0.01"``, a configured compressor, or a
            mapping from patterns of parameter names to these; by default what
            ``MPICOMP_COMPRESSION`` says, or ``"none"``. ``"auto"``, or `Auto` with candidates,
            finds out in the first steps which of them pays, if any.
        backward_passes_per_step: gradients are summed locally over this many backward passes and
            exchanged in the last one.
        model: gives the names, and its buffers are broadcast too.
        grad_scaler: a `torch.amp.GradScaler`; what compressors remember is then kept in units
            that do not change with the loss scale.
        broadcast: send rank 0's parameters, buffers and optimizer state to all ranks first.
        fusion_mb: size of a bucket of gradients, in MB (2**20 bytes).

    Raises:
        ValueError: an argument does not fit; names are missing or not unique; momentum would be
            applied twice.
        MismatchError: the ranks do not hold the same model; on every rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: Compression | Auto = None,
        backward_passes_per_step: int = 1,
        *,
        model: nn.Module | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        broadcast: bool = True,
        fusion_mb: float | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"DistributedOptimizer: optimizer must be torch's, got {optimizer!r}")
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("DistributedOptimizer: optimizer must not be wrapped already")
        if backward_passes_per_step < 1:
            raise ValueError(
                "DistributedOptimizer: backward_passes_per_step must be at least 1, "
                f"got {backward_passes_per_step}"
            )
        settings = _world.get().settings
        if fusion_mb is None:
            fusion_mb = settings.fusion_mb
        if not fusion_mb > 0:
            raise ValueError(f"DistributedOptimizer: fusion_mb must be above 0, got {fusion_mb}")
        if isinstance(named_parameters, str):
            raise ValueError(
                "DistributedOptimizer: named_parameters must be pairs of name and parameter, "
                f"got {named_parameters!r}; did you mean compression={named_parameters!r}?"
            )
        if isinstance(named_parameters, nn.Module):
            raise TypeError(
                "DistributedOptimizer: named_parameters must be pairs of name and parameter, got a "
                f"{type(named_parameters).__name__}; did you mean model=?"
            )
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        self.optimizer = optimizer
        self._names = dict(named_parameters or ())
        self._compression = settings.compression if compression is None else compression
        self._auto = as_auto(self._compression)
        self._rules = without_auto(self._compression)  # what the engine begins with
        self._refuse_second_momentum(optimizer.param_groups)
        self._fusion_mb = fusion_mb
        self._grad_scaler = grad_scaler
        self.backward_passes_per_step = backward_passes_per_step
        self._start()
        if self._engine is not None:
            if grad_scaler is not None:
                self._precede(grad_scaler)
            self._engine.agree()
            if broadcast:
                broadcast_parameters(self._named(), root_rank=0)
                broadcast_parameters(model.named_buffers() if model else {}, root_rank=0)
                broadcast_optimizer_state(optimizer, root_rank=0)

    def _start(self) -> None:
        self._no_sync = False
        self._engine: Engine | None = None
        params = self._named()
        if _world.size() > 1 or self._momentum_methods():
            self._engine = Engine(
                params,
                self._rules if _world.size() > 1 else alone(self._rules),
                bucket_bytes=self._fusion_mb * 2**20,
                loss_scale=self._loss_scale,
                holding=self._holding,
            )
            if self._auto is not None:
                self._engine.autopilot = Autopilot(
                    self._engine, self._auto, bucket_bytes=self._fusion_mb * 2**20
                )
        else:  # mistakes in rules show on one rank too
            assign(self._rules, [(name, tuple(p.shape), p.dtype) for name, p in params])

    def _named(self, first_group: int = 0) -> list[tuple[str, nn.Parameter]]:
        """Parameters in order of registration; one without a name is called by its place."""
        names = {id(param): name for name, param in self._names.items()}
        if len(names) < len(self._names):
            raise ValueError("DistributedOptimizer: named_parameters must name each parameter once")
        return [
            (names.get(id(param), f"group{number}.{place}"), param)
            for number, group in enumerate(self.optimizer.param_groups)
            for place, param in enumerate(group["params"])
            if number >= first_group
        ]

    def _momentum_methods(self) -> list[Compressor]:
        """Compressors that apply momentum themselves; with one rank too."""
        return [c for _, c in resolve(self._rules) if c.capabilities.momentum]

    def _refuse_second_momentum(self, groups: Iterable[dict[str, Any]]) -> None:
        for method in self._momentum_methods():
            for group in groups:
                own = {
                    "momentum": group.get("momentum"),
                    "betas[0]": group.get("betas", (0.0,))[0],
                }
                for option, momentum in own.items():
                    if momentum:
                        raise ValueError(
                            f"DistributedOptimizer: optimizer must have {option} 0 with {method}, "
                            f"which applies momentum before it compresses, got {momentum}; set it "
                            "to 0 in the optimizer, or set momentum=0 in the compressor"
                        )

    def _loss_scale(self) -> float:
        scaler = self._grad_scaler
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    def _holding(self, passes: int) -> bool:
        return self._no_sync or passes + 1 < self.backward_passes_per_step

    # --------------------------------------------------------------------------- training

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the wrapped optimizer; gradients that were only accumulated are exchanged first."""
        self.synchronize()
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def _precede(self, scaler: torch.amp.GradScaler) -> None:
        """Have ``scaler`` look at gradients only when they are means, after a short window too."""
        for name in ("unscale_", "step"):
            before = scaler.__dict__.get(name) or partial(getattr(type(scaler), name), scaler)
            setattr(scaler, name, partial(self._synchronize_first, before))

    def _synchronize_first(
        self, method: Callable[..., Any], optimizer: Any, *args: Any, **options: Any
    ) -> Any:
        if optimizer is self:
            self.synchronize()
        return method(optimizer, *args, **options)

    def close(self) -> None:
        """Stop exchanging gradients, and free what was used for it; on all ranks alike.

        Needed only by programs that make many optimizers, one after another.
        """
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def synchronize(self) -> None:
        """Exchange what was accumulated and not exchanged yet; otherwise harmless."""
        if self._engine is not None:
            self._engine.synchronize()

    def watch(self, observer: Observer) -> None:
        """Let ``observer`` look at every exchange from now on, as `mpicomp.observe` does."""
        if self._engine is not None:
            if self._engine.observer is not None:
                raise ValueError(f"watch: there must be one observer, got {observer!r} as a second")
            self._engine.observer = observer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer."""
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to ``p.grad`` of this rank alone.

        The next one outside, or `step`, exchanges the sum.
        """
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For Horovod scripts: `step` never exchanges twice, so there is nothing to skip."""
        yield

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train in here when ranks may have different numbers of batches.

        Wrap the loop over batches, on all ranks. A rank that leaves early takes part in the
        exchanges of the others without adding to them: means are over the ranks that still have
        data, and its own residuals stay as they are. At the end all ranks get the parameters and
        the optimizer state of one that went on longest.
        """
        if self._engine is None:
            yield
            return
        world = _world.get()
        if world.joining:
            raise ValueError(
                "join: must not be used within the join of another optimizer, whose exchanges a "
                "rank without data could not follow; give all ranks equally many batches"
            )
        engine = self._engine
        world.joining = engine.joining = True
        engine.exhausted = False
        try:
            yield
            engine.exhausted = True
            while engine.shadow():
                pass
            engine.forget_held()
        finally:
            world.joining = engine.joining = False
        if engine.last_active:
            root = engine.last_active[0]
            broadcast_parameters(self._named(), root_rank=root)
            broadcast_optimizer_state(self.optimizer, root_rank=root)
            for slot, tensors in engine.memory().items():
                if slot not in PRIVATE_SLOTS:
                    broadcast_parameters(tensors, root_rank=root)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer; on all ranks alike."""
        self._refuse_second_momentum([{**self.optimizer.defaults, **param_group}])
        known = len(self.optimizer.param_groups)
        self.optimizer.add_param_group(param_group)
        if self._engine is not None:
            self._engine.add(self._named(first_group=known))
            self._engine.agree()

    # ------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer, and what this rank's compressors remember, by parameter."""
        state: dict[str, Any] = self.optimizer.state_dict()
        memory = self._remembered()
        return {**state, _MEMORY: memory} if memory else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`, also one of an optimizer that was not wrapped; on all ranks.

        What compressors remember of one rank's gradients belongs to that rank: that of another
        rank, or of a job of another size, is left out, with a warning. What they remember in
        common, such as counts of steps, is taken over all the same, so that ranks that load the
        same file still agree on what is sent.
        """
        state = dict(state_dict)
        saved = state.pop(_MEMORY, None)
        self.optimizer.load_state_dict(state)
        self._recall(saved)

    def _remembered(self) -> dict[str, Any] | None:
        memory = self._engine.memory() if self._engine is not None else {}
        if not memory:
            return None
        return {"rank": _world.rank(), "size": _world.size(), "memory": memory}

    def _recall(self, saved: dict[str, Any] | None) -> None:
        """Let the compressors remember what `_remembered` gave, and nothing else."""
        if self._engine is None:
            return
        memory = saved["memory"] if saved else {}
        if saved and (saved["rank"], saved["size"]) != (_world.rank(), _world.size()):
            if PRIVATE_SLOTS & memory.keys():
                warnings.warn(
                    f"the residuals in this state belong to rank {saved['rank']} of "
                    f"{saved['size']}, not to rank {_world.rank()} of {_world.size()}; they are "
                    "not used, and error feedback starts from zero on this rank; save one file "
                    "per rank to keep them",
                    stacklevel=3,
                )
            memory = {slot: of for slot, of in memory.items() if slot not in PRIVATE_SLOTS}
        self._engine.restore(memory)

    def __getstate__(self) -> dict[str, Any]:
        own = {k: v for k, v in self.__dict__.items() if k not in ("_engine", "step")}
        return own | {_MEMORY: self._remembered()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        memory = state.pop(_MEMORY)
        self.__dict__.update(state)
        self._start()
        self._recall(memory)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: this object is being unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r}, compression={self._compression!r})"

    param_groups = _delegated("param_groups")
    state = _delegated("state")
    defaults = _delegated("defaults")
    grad_scale = _delegated("grad_scale")  # these two are set by GradScaler for fused optimizers
    found_inf = _delegated("found_inf")
