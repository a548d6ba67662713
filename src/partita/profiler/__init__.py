"""From models to graphs and from machines to clusters: capture, measurement, calibration."""
