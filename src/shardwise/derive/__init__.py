"""From a layout to specs of every named tensor and the communication that follows; what is saved and live; products solved."""
