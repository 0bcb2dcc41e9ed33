"""`python -m attention_worker.vllm_hooks.serve ARGUMENTS`: vLLM's API server.

It imports everything before it is the server, so that the engine need not (kept_fork.py).
"""

import sys

from afd.config.roles import load_role
from attention_worker.vllm_hooks.standby import become_server, import_all

if __name__ == "__main__":
    import_all(load_role())
    become_server(sys.argv[1:])
