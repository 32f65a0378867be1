"""Where bytes lie and who moves them: chunks, tiers, budgets, meters. Knows no module and no autograd."""
