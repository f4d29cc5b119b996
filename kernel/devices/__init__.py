"""One file per device; the folder listing is the list of devices."""
