"""Where each tensor sits: pure arithmetic on names, element counts and bytes. Imports no torch."""
