"""Reports: pages that show what runs did, from their logs."""
