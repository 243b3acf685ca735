"""Start training jobs under whichever MPI the target Python uses: `mpicomp-launch`."""
