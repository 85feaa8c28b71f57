"""Health: after each step a set of rules says what is wrong, the likely cause and what to do."""
