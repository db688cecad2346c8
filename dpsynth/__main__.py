"""`python -m dpsynth`."""

from dpsynth.cli import main

if __name__ == "__main__":
    main()
