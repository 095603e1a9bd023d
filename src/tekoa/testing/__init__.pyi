from tekoa.testing.compare import assert_trees_equal as assert_trees_equal
from tekoa.testing.compilations import Compilations as Compilations
from tekoa.testing.compilations import count_compilations as count_compilations
from tekoa.testing.kills import KillReport as KillReport
from tekoa.testing.kills import check_kills as check_kills
from tekoa.testing.resume import check_resume as check_resume
