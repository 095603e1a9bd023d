#!/bin/bash
# Trains on several nodes of a SLURM cluster, one process per node, until training is complete.
#
#   sbatch --nodes=4 deploy/slurm.sh my_model.py --model_dir=/shared/run
#
# 120 seconds before the time limit all processes are asked to stop: they save a checkpoint and exit
# with 75. After that, and after the loss of a process (69, or 134 if JAX noticed it), the job goes
# back to the queue and resumes from the last checkpoint. SLURM itself requeues a job only when a
# node fails, whatever --requeue says. 137 and 143 are the codes of processes that were killed, also
# by srun after the first one has ended.
#
# An error of one process ends the job, whatever the others end with. srun returns only the highest
# exit code, so those of the processes are read from its messages: "task 1: Exited with exit code 2".
#SBATCH --job-name=tekoa
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

max_restarts=${TEKOA_MAX_RESTARTS:-50}

# Without --kill-on-bad-exit the other processes of a lost one would keep their nodes for as long as
# it takes them to notice.
set -o pipefail
exec 3>&1
codes=$(srun --kill-on-bad-exit=1 tekoa train "$@" --coordinator_address=auto 2>&1 >&3 |
  tee -a /dev/stderr | sed -n 's/^srun: error: .*: Exited with exit code \([0-9]*\)$/\1/p')
code=$?

for each in $codes $code; do
  case $each in
    69 | 75 | 134 | 137 | 143) ;;
    *) exit "$each" ;;
  esac
done
if ! scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
  exit "$code" # Cancelled: it would start again.
fi
if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_restarts" ]; then
  echo "Exit code $code after $max_restarts restarts; giving up." >&2
  exit "$code"
fi
echo "Exit code $code; resuming in a new allocation." >&2
scontrol requeue "$SLURM_JOB_ID"
