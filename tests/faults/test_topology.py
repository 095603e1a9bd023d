"""A22: a saved step can be restored on any other number of devices."""

import pytest


@pytest.mark.slow
def test_other_device_counts_restore_the_same_bits(launch, figure, tmp_path):
    outcomes = []
    for n_devices in (8, 4, 1, 2, 8):
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}"}
        code, facts, errors = launch("topology.py", tmp_path, env=flags).wait()
        assert code == 0, errors
        outcomes.append(facts[0])
    assert [fact["devices"] for fact in outcomes] == [8, 4, 1, 2, 8]
    assert [fact["step"] for fact in outcomes] == [0, 1, 2, 3, 4]
    assert all(fact["exact"] and fact["placed"] for fact in outcomes)
    figure(devices=[8, 4, 1, 2, 8], max_difference=0)
