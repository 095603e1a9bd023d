"""The points that TensorBoard shows for a directory, read by TensorBoard itself."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_points(directory):
    """Returns `{tag: [(step, value), ...]}` of all scalars, in the order of the files."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(point.step, point.value) for point in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }
