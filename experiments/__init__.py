"""Programs that train, measure and report; each is run with `python -m`."""
