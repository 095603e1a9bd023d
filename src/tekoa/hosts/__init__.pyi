from tekoa.hosts.connect import HostsError as HostsError
from tekoa.hosts.group import EXIT_PEER_LOST as EXIT_PEER_LOST
from tekoa.hosts.group import Hosts as Hosts
from tekoa.hosts.group import current as current
from tekoa.hosts.group import join as join
from tekoa.hosts.signals import EXIT_STOPPED as EXIT_STOPPED
from tekoa.hosts.signals import StopFlag as StopFlag
from tekoa.hosts.signals import stop_flag as stop_flag
