"""A22: a step saved on some devices comes back on any other number of them."""


def test_other_device_counts_restore_the_same_bits(launch, figure, tmp_path):
    seen = []
    for n_devices in (8, 4, 1, 2, 8):
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}"}
        code, facts, errors = launch("topology.py", tmp_path, env=flags).end(30)
        assert code == 0, errors
        seen.append(facts[0])
    assert [fact["devices"] for fact in seen] == [8, 4, 1, 2, 8]
    assert [fact["step"] for fact in seen] == [0, 1, 2, 3, 4]
    assert all(fact["exact"] and fact["placed"] for fact in seen)
    figure(devices="8 4 1 2 8", max_difference=0)
