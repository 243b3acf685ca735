"""`python -m mpicomp.advise`: does compression pay for this model on this network?"""
