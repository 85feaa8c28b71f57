#!/usr/bin/env bash
# The driver of a run: starts it, goes on with it after a crash or a requeue, or starts it over if it had no checkpoint yet.
# Needs RECIPE (a name or file) and RUN_DIR (a folder that all machines see under this path); more key=value as arguments.
set -euo pipefail
: "${RECIPE:?set RECIPE: a shipped recipe or a YAML file}" "${RUN_DIR:?set RUN_DIR: a folder that all machines see}"

shopt -s nullglob
how=() quote="'" checkpoints=("$RUN_DIR"/checkpoints/step_*)
if [ ${#checkpoints[@]} -gt 0 ]; then
  how=(--resume)
elif [ -e "$RUN_DIR/recipe.yaml" ]; then
  how=(--restart)
fi
# In YAML's quotes, or what follows a # in the name would be a comment.
exec sensorium train "$RECIPE" "run_dir=$quote${RUN_DIR//$quote/$quote$quote}$quote" "$@" ${how[@]+"${how[@]}"}
