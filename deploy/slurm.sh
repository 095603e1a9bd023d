#!/bin/bash
# Trains on several nodes of a SLURM cluster, one process per node, until training is complete.
#
#   sbatch --nodes=4 deploy/slurm.sh my_model.py --model_dir=/shared/run
#
# 120 seconds before the time limit all processes are asked to stop: they save a checkpoint and exit
# with 75. After that, and after the loss of a process (69, or 134 if JAX noticed it), the job goes
# back to the queue and resumes from the last checkpoint. SLURM itself requeues a job only when a
# node fails, whatever --requeue says. srun returns the highest exit code; 137 and 143 are those of
# processes that were killed, also by srun after the first one has ended.
#SBATCH --job-name=tekoa
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

max_restarts=${TEKOA_MAX_RESTARTS:-50}

# Without --kill-on-bad-exit the other processes of a lost one would keep their nodes for as long as
# it takes them to notice.
srun --kill-on-bad-exit=1 tekoa train "$@" --coordinator_address=auto
code=$?

case $code in
  69 | 75 | 134 | 137 | 143) ;;
  *) exit "$code" ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_restarts" ]; then
  echo "Exit code $code after $max_restarts restarts; giving up." >&2
  exit "$code"
fi
echo "Exit code $code; resuming in a new allocation." >&2
scontrol requeue "$SLURM_JOB_ID"
