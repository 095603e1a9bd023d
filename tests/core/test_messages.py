import logging
import subprocess
import sys

from tekoa.core import messages


def test_flags_are_offered_with_their_dashes():
    text = messages.did_you_mean("model_dri", ["model_dir", "random_seed"], n=3, prefix="--")
    assert text == " Did you mean '--model_dir'?"


def test_several_choices_are_joined_by_or():
    assert messages.did_you_mean("ab", ["abc", "abd", "xyz"], n=2).count(" or ") == 1


def test_a_short_list_is_shown_in_full():
    assert messages.some_of(["a", "b"]) == "a, b"
    assert messages.some_of([]) == ""


def test_a_scalar_has_an_empty_shape():
    assert messages.array_text("int32", ()) == "int32[]"


def test_messages_do_not_import_jax():
    code = "import sys, tekoa.core.messages; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_log_of_a_library_is_hidden_unless_its_level_is_set():
    log = logging.getLogger("a library that logs its errors")
    messages.quiet_log(log.name)
    assert not log.isEnabledFor(logging.ERROR)
    log.setLevel(logging.DEBUG)
    messages.quiet_log(log.name)
    assert log.isEnabledFor(logging.DEBUG)
