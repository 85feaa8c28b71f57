"""From the command lines, scripts and configurations of other trainers to a recipe, and a table of what each key became."""
