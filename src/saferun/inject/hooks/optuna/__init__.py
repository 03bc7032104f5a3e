"""The hook for searches with Optuna: the study's storage is the truth about its trials."""
