import pytest

from tekoa.core.files import PathError
from tekoa.store.mirror.urls import clean_url, is_url


@pytest.mark.parametrize(
    "url", ["s3://bucket", "gs://b/", "s3://b/../x", "s3://b/*.npz", "memory://", "s3://b/x\0"]
)
def test_urls_that_are_no_directory_are_refused(url):
    with pytest.raises(PathError, match=r"run directory|complete bucket"):
        clean_url(url)


def test_a_url_that_pathlib_shortened_is_the_same():
    import pathlib

    assert clean_url(pathlib.PurePosixPath("s3://bucket/run/")) == "s3://bucket/run"
    assert not is_url("http://bucket/run")
