"""The page on which anyone sees what each drafter does."""
