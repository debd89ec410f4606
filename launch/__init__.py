"""The commands: `python -m launch.<name>`. One file each: flags → config → one call."""
