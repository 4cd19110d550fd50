"""The probe: speed of compute, links and codecs of these machines."""
