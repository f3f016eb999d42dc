"""How a trained drafter is served."""
