"""Has vLLM's processes pause while they look at their queues, for PAUSE_S from the environment.

They do so until one second after a message, for the next one's sake. With several engines on two
cores that takes what the others need.
"""

import functools
import os
import time

from vllm.distributed.device_communicators import shm_broadcast

shm_broadcast.sched_yield = functools.partial(time.sleep, float(os.environ.get("PAUSE_S", "0.001")))
