"""Learning from verification, for every drafter that does: records, a trained correction, its guard, its files."""
