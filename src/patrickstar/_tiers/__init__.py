"""Device, host and disk: their budgets, the chunks that they store, the bytes that move, and their record."""
