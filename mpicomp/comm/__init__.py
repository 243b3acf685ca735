"""The MPI layer: tensors in, tensors out. The only package that imports mpi4py."""
