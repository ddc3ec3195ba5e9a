"""Of blocks, their workspaces, and threads."""

from __future__ import annotations

from ...mutant import mutant

_SECOND_THREAD = "nn/test_second_thread.py"
_STREAMS = "nn/test_workspace_streams.py"

MUTANTS = (
    mutant(
        "a-second-thread-is-in-the-block",
        "nn/group.py",
        "return space if space is not None and space.thread == get_ident() else None",
        "return space",
        "a thread reads a weight from the workspace of another, which is being overwritten",
        _SECOND_THREAD,
    ),
    mutant(
        "a-second-thread-is-live",
        "nn/group.py",
        "            and space.filled is self\n            and space.thread == get_ident()\n",
        "            and space.filled is self\n",
        "a thread that another waits for computes with the other's workspace",
        _SECOND_THREAD,
    ),
    mutant(
        "a-second-thread-is-open",
        "nn/scope.py",
        "    if space.thread != get_ident() or space.group is not group:\n",
        "    if space.group is not group:\n",
        "a thread enters the block of another without its lock",
        _SECOND_THREAD,
    ),
    mutant(
        "a-second-thread-has-room-for-tiles",
        "nn/group.py",
        "if space is None or space.thread != get_ident() or space.group is not self:",
        "if space is None or space.group is not self:",
        "a thread decodes tiles over those of another",
        _SECOND_THREAD,
    ),
    mutant(
        "a-workspace-belongs-to-its-last-thread",
        "nn/scope.py",
        "            space.filled = space.group = None\n            space.thread = 0\n",
        "            space.group = None\n            space.thread = 0\n",
        "a block takes what is in the workspace for its own weights after another has been there",
        "nn/test_workspace.py",
    ),
    mutant(
        "scopes-keep-their-lock",
        "nn/scope.py",
        "                space.some.clear()\n        space.lock.release()\n",
        "                space.some.clear()\n        if space.depth:\n            space.lock.release()\n",
        "no second thread ever computes",
        _SECOND_THREAD,
    ),
    mutant(
        "threads-beside-stay-beside",
        "nn/scope.py",
        "                space.beside.discard(get_ident())\n",
        "                pass\n",
        "a thread that once had to decode copies always does",
        _SECOND_THREAD,
    ),
    mutant(
        "experts-are-taken-for-the-next-blocks",
        "nn/scope.py",
        "            if space.some:\n                space.some.clear()\n",
        "",
        "what was decoded alone in one block is taken for decoded in the next",
        _SECOND_THREAD,
    ),
    mutant(
        "changes-are-not-looked-for",
        "nn/scope.py",
        "        if self.outermost:\n            self.space.check()\n",
        "        return\n",
        "a weight that a forward pass changes is changed for this pass alone",
        "nn/test_changes_within.py",
    ),
    mutant(
        "weights-overlap",
        "nn/group.py",
        "                at += align(slot.nbytes, ALIGN)\n",
        "                at += slot.nbytes\n",
        "weights start at odd addresses of the workspace",
        "nn/test_workspace.py",
    ),
    mutant(
        "a-workspace-of-the-last-block",
        "nn/group.py",
        "        pool.capacity = max(pool.capacity, at)\n",
        "        pool.capacity = at\n",
        "a larger block makes its own workspace each time",
        "nn/test_workspace_memory.py",
    ),
    mutant(
        "a-workspace-is-released-while-it-is-used",
        "nn/workspace.py",
        "            if self.depth or capturing(self.device):\n                return 0\n",
        "            if capturing(self.device):\n                return 0\n",
        "a block's weights are given back while it computes",
        _STREAMS,
    ),
    mutant(
        "kept-weights-are-overwritten",
        "nn/workspace.py",
        "        if self._storage is None or self.recorded or self._uses() <= self._known:\n            return\n",
        "        if self._storage is not None:\n            return\n",
        "a weight that somebody keeps becomes that of the next block",
        _STREAMS,
    ),
    mutant(
        "another-stream-is-not-waited-for",
        "nn/workspace.py",
        "                stream.wait_stream(self._stream)\n",
        "                pass\n",
        "two streams decode to the workspace at a time",
        _STREAMS,
    ),
    mutant(
        "a-workspace-goes-back-too-soon",
        "nn/workspace.py",
        "            self.buffer.record_stream(self._stream)\n",
        "            pass\n",
        "memory is given to others while a stream still reads weights there",
        _STREAMS,
    ),
    mutant(
        "errors-are-told-as-kept-weights",
        "nn/workspace.py",
        "        if not self._told and sys.exc_info()[0] is None:\n",
        "        if not self._told:\n",
        "a warning of a kept weight stands before the error of a damaged one",
        "nn/test_parameters.py",
    ),
)
