"""Numbers in, numbers out: events, sensitivities, calibration, composition."""
