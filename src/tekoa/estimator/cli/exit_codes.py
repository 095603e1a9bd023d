"""The exit codes of `tekoa`, with the meanings shown in the help and the documentation."""

import enum


class ExitCode(enum.IntEnum):
    """An exit code and its meaning; a test compares them with the codes of the errors."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> "ExitCode":
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    SUCCESS = 0, "success"
    UNEXPECTED = 1, "unexpected error, with a traceback"
    USAGE = 2, "usage error"
    DAMAGED = 65, "no usable checkpoint, or a damaged file of the run"
    MISMATCH = 66, "the checkpoint does not match the model; the message lists all differences"
    PEER_LOST = 69, "another process of the run failed or hung"
    STORE = 70, "other error while reading or writing files of the run"
    IN_USE = 73, "another process is writing to the directory"
    SAVE_FAILED = 74, "a checkpoint could not be saved"
    STOPPED = 75, "stopped by a signal; run the same command again to resume"
    NON_FINITE = 76, "NaN or Inf in loss, gradients or update; the last good state is saved"
    NEWER_VERSION = 78, "the checkpoint was written by a later version of Tekoa"
    HANGUP = 129, "ended by SIGHUP twice, or before anything could be saved"
    INTERRUPTED = 130, "interrupted by Ctrl-C twice, or before anything could be saved"
    USER_SIGNAL = 138, "ended by SIGUSR1 twice, or before anything could be saved"
    PIPE = 141, "output pipe closed"
    TERMINATED = 143, "ended by SIGTERM twice, or before anything could be saved"
