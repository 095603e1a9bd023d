"""Reads data patterns and turns them into batches in a reproducible order."""

from tekoa.data.batches import Batches as Batches
from tekoa.data.foreign import as_batches as as_batches
from tekoa.data.foreign import as_source as as_source
from tekoa.data.functions import DataFn as DataFn
from tekoa.data.language import tokens as tokens
from tekoa.data.patterns import filenames as filenames
from tekoa.data.patterns import load as load
from tekoa.data.pipelines import lines_iterator as lines_iterator
from tekoa.data.pipelines import lm_data as lm_data
from tekoa.data.pipelines import rec_data as rec_data
from tekoa.data.prefetch import device_prefetch as device_prefetch
from tekoa.data.reader import ChangedDataError as ChangedDataError
from tekoa.data.reader import DataError as DataError
from tekoa.data.reader import Info as Info
from tekoa.data.source import Source as Source
