"""Reference runs: what a plan gives without clip and noise, and what its public model gives.

A ceiling and a floor beside a private run, for its curator alone (`dpsynth reference`). Nothing
here charges, nothing is written outside `curator/`, and no file of it is one that a released
loader takes. (`assess.audit.reference` is something else: the reference models of an attack.)
"""
