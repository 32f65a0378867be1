"""Integrations with other libraries; each package has the name of its library."""
