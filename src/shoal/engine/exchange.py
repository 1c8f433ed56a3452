"""The exchange of commands and answers with the workers of one pool: send, wait, notice who is gone, collect."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.engine import pickling
from shoal.engine.channel import Channel, UnreadableMessage, wait_for
from shoal.engine.errors import EnvError, Fault, WorkerDied, WorkerTimeout
from shoal.engine.launch import Launcher
from shoal.engine.protocol import Answer, Control, Flag, Opcode
from shoal.engine.signals import POLL_SECONDS, POLL_SECONDS_ON_FULL_CPUS, Waiter, empty, usable_cpus

LOOK_SECONDS = 0.1
"""How often a wait is interrupted to look after the processes that it waits for."""

_POLL_SECONDS = 1e-3
_SYNC_SECONDS = 60.0
_END_SECONDS = 5.0


class Exchange:
    """Runs commands on workers.

    A worker that dies, or that is killed because its answer is late, may leave the completion of that command with
    any count. So the parent never looks at that count again: it learns from the answer words who of the others has
    finished, and goes over to the other completion. That one is free: whoever has answered a command through the
    one has long finished with the other, and `_synchronise` makes all of them do so.

    Args:
        control: the pool's control words; parent side.
        groups: the rows of each worker.
        launcher: watches over the workers.
        channels: to each worker.
        gathers: whether a lost worker is a fault of its rows among the answer's, so that the others' results are kept
            (else it is raised at once).

    Attributes:
        lost: the workers that are gone, and what became of them.
        broken: whether an exchange was left half done, so that nothing can follow it.
    """

    def __init__(
        self,
        control: Control,
        groups: Sequence[Sequence[int]],
        launcher: Launcher,
        channels: dict[int, Channel],
        *,
        gathers: bool,
    ) -> None:
        self._control = control
        self._groups = groups
        self._launcher = launcher
        self._channels = channels
        self._gathers = gathers
        self._all = list(range(len(groups)))
        self._worker_of = {row: worker for worker, rows in enumerate(groups) for row in rows}
        self._doorbells = control.signals.doorbells
        self._ring = [doorbell.release for doorbell in self._doorbells]
        self._poll_seconds = POLL_SECONDS_ON_FULL_CPUS if len(groups) == usable_cpus() else POLL_SECONDS
        self._sequence = 0
        self._pending: tuple[int, list[int], Opcode, float] | None = None
        self.lost: dict[int, WorkerDied | WorkerTimeout] = {}
        self.broken = False
        self._silent = False
        self._use(0)

    def _use(self, number: int) -> None:
        """Goes over to a completion that no worker touches."""
        completion = self._control.signals.completions[number]
        empty(completion.countdown, completion.done)
        self._number = number
        self._flag = Flag.SECOND if number else Flag.NONE
        self._prime = completion.countdown.release
        self._waiter = Waiter(completion.done, self._poll_seconds)

    @property
    def interrupted(self) -> bool:
        """Whether workers may still be at a command whose caller went away."""
        return self._pending is not None

    # One command.

    def run(
        self,
        opcode: Opcode,
        rows: Sequence[int] | None,
        given: dict[int, Any] | None,
        limit: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer | None:
        """Runs one command on some rows and waits until all of them have answered; see `Pool.execute`."""
        if self._pending is not None:
            self._settle()
        if rows is None and given is None and not self.lost:
            return self._run_all(opcode, limit, meanwhile)
        flags = self._flag
        if rows is None:
            workers = self._all
        else:
            workers, flags = self._address(rows), flags | Flag.MASKED
        gone: list[int] = []
        if self.lost:
            gone = [worker for worker in workers if worker in self.lost]
            workers = [worker for worker in workers if worker not in self.lost]
        answer: Answer | None = None
        if workers:
            packed = None
            if given is not None:
                flags |= Flag.MESSAGE
                packed = self._pack(given, workers, opcode)
            self._send(opcode, workers, flags, packed, limit)
            if not self._waiter.wait(min(limit, LOOK_SECONDS)):
                self._wait_longer(self._sequence, workers, opcode, limit)
            answer = self._collect(self._sequence, workers, opcode, limit)
        if gone:
            answer = answer or Answer()
            answer.faults.extend(self.faults_of(gone, opcode))
        return answer

    def _run_all(self, opcode: Opcode, limit: float, meanwhile: Callable[[], None] | None) -> Answer | None:
        """`run` for all workers, none of them gone and nothing to say by message: what a step mostly is."""
        workers = self._all
        self._sequence = sequence = self._sequence + 1
        try:
            self._control.command_all(sequence, opcode, self._flag)
            prime = self._prime
            for _ in workers[1:]:
                prime()
            for ring in self._ring:
                ring()
            self._pending = (sequence, workers, opcode, limit)
        except BaseException:
            self.broken = True
            raise
        if meanwhile is not None:
            meanwhile()
        if not self._waiter.wait(min(limit, LOOK_SECONDS)):
            self._wait_longer(sequence, workers, opcode, limit)
        if self.lost or self._silent or not self._control.all_answered(sequence):
            return self._collect(sequence, workers, opcode, limit)
        self._pending = None
        return None

    def _address(self, rows: Sequence[int]) -> list[int]:
        """Marks the rows in the mask and gives their workers."""
        mask = self._control.mask
        mask[:] = bytes(len(mask))
        for row in rows:
            mask[row] = 1
        return sorted({self._worker_of[row] for row in rows})

    def _pack(self, given: dict[int, Any], workers: list[int], opcode: Opcode) -> dict[int, bytes]:
        """Pickles the arguments of each worker's rows, before any worker hears of the command.

        Raises:
            TypeError: they cannot be pickled; nothing has happened.
        """
        packed = {}
        for worker in workers:
            part = {row: given[row] for row in self._groups[worker] if row in given}
            try:
                packed[worker] = pickling.dumps(part)
            except Exception as error:
                raise TypeError(
                    f"what {opcode.command!r} was given for {rows_in_words(list(part))} cannot be sent to a worker "
                    f"process: {error}"
                ) from error
        return packed

    def _send(
        self, opcode: Opcode, workers: list[int], flags: int, packed: dict[int, bytes] | None, limit: float
    ) -> None:
        self._sequence = sequence = self._sequence + 1
        try:
            command, ring, prime = self._control.command, self._ring, self._prime
            for worker in workers:
                command(worker, sequence, opcode, flags)
            for _ in range(len(workers) - 1):
                prime()
            for worker in workers:
                ring[worker]()
            if packed:
                deadline = time.monotonic() + limit
                for worker, data in packed.items():
                    self._send_packed(worker, data, opcode, deadline, limit)
            self._pending = (sequence, workers, opcode, limit)
        except BaseException:
            self.broken = True  # half a command: what workers make of it is not worth knowing
            raise

    def _send_packed(self, worker: int, data: bytes, opcode: Opcode, deadline: float, limit: float) -> None:
        patience = self.patience(worker, opcode, deadline, limit)
        try:
            try:
                self._channels[worker].send_packed(data, self._sequence, (), patience)
            except OSError:
                raise self.death(worker, opcode) from None
        except (WorkerDied, WorkerTimeout) as error:
            self._lose([worker], error)

    def _wait_longer(
        self, sequence: int, workers: list[int], opcode: Opcode, limit: float, *, unsure: bool = False
    ) -> None:
        """Goes on waiting where the first look was not enough: sleeps in bounded pieces, looks after the workers.

        With ``unsure`` it does not rely on the completion, which somebody may have heard already.
        """
        deadline = time.monotonic() + limit - min(limit, LOOK_SECONDS)
        while True:
            late = [w for w in workers if self._control.read_answer(w)[0] != sequence and w not in self.lost]
            self._look_after(late, opcode, deadline, limit)
            if unsure or (self.lost and not self.lost.keys().isdisjoint(workers)):
                # The countdown will not come to its end, or has been heard: only the answers tell who has finished.
                if all(worker in self.lost for worker in late):
                    return
                time.sleep(_POLL_SECONDS)
            elif not late:
                # All have answered, so the ring is on its way; one that does not come must not be waited for.
                self._silent = not self._waiter.wait(LOOK_SECONDS)
                return
            elif self._waiter.wait(min(LOOK_SECONDS, max(deadline - time.monotonic(), 0.0))):
                return

    def _collect(self, sequence: int, workers: list[int], opcode: Opcode, limit: float) -> Answer | None:
        """Reads the answers of workers that have all finished or are lost."""
        answer: Answer | None = None
        read_answer = self._control.read_answer
        try:
            for worker in workers:
                if worker in self.lost:
                    continue
                answered, flags = read_answer(worker)
                if answered != sequence:
                    raise RuntimeError(f"shoal: worker {worker} answered command {answered} instead of {sequence}")
                if flags:
                    answer = answer or Answer()
                    self._take_message(worker, opcode, limit, sequence, answer)
            if self._silent:
                self._silent = False
                self._synchronise(opcode)
            if self.lost:
                lost = [worker for worker in workers if worker in self.lost]
                if lost:
                    answer = answer or Answer()
                    answer.faults.extend(self.faults_of(lost, opcode))
                    self._synchronise(opcode)
        except BaseException:
            self.broken = True  # half an answer: what follows could not be told from the rest of it
            raise
        self._pending = None
        return answer

    def _take_message(self, worker: int, opcode: Opcode, limit: float, sequence: int, answer: Answer) -> None:
        try:
            message = self.receive(worker, opcode, time.monotonic() + limit, limit, sequence)
        except UnreadableMessage as error:
            for row in self._groups[worker]:
                unreadable = EnvError(
                    f"what row {row} gave back from {opcode.command!r} does not unpickle in this process: {error}"
                )
                answer.faults.append(Fault.capture(row, opcode.command, unreadable, remote=False))
            return
        except (WorkerDied, WorkerTimeout) as error:
            self._lose([worker], error)
            return
        answer.values.update(message.values)
        answer.faults.extend(message.faults)

    def _settle(self) -> None:
        """Waits for the answers of a command whose caller went away (Ctrl-C), and drops them.

        The caller may have gone at any moment, also after the completion was heard and before anybody noted that.
        """
        assert self._pending is not None
        sequence, workers, opcode, limit = self._pending
        self._wait_longer(sequence, workers, opcode, limit, unsure=True)
        self._collect(sequence, workers, opcode, limit)
        self._synchronise(opcode)
        self._pending = None

    def close_all(self, workers: Sequence[int]) -> None:
        """Tells workers to close their environments and end; does not wait for it."""
        self._sequence += 1
        for worker in workers:
            self._control.command(worker, self._sequence, Opcode.CLOSE, Flag.NONE)
            self._ring[worker]()

    # Workers that are gone.

    def _synchronise(self, opcode: Opcode) -> None:
        """Goes over to the other completion, and sees to it that all living workers have finished with this one.

        Args:
            opcode: the command that it is part of.
        """
        try:
            while True:
                self._use(1 - self._number)
                living = [worker for worker in self._all if worker not in self.lost]
                if not living:
                    return
                before = len(self.lost)
                limit = _SYNC_SECONDS
                self._send(Opcode.SYNC, living, self._flag, None, limit)
                if not self._waiter.wait(LOOK_SECONDS):
                    self._wait_longer(self._sequence, living, opcode, limit)
                if len(self.lost) == before:
                    return
        except BaseException:
            self.broken = True
            raise

    def _look_after(self, workers: list[int], opcode: Opcode, deadline: float, limit: float) -> None:
        """Loses those of the workers that have died; all of them once the deadline has passed."""
        self._launcher.look()
        for worker in workers:
            if worker in self._launcher.exitcodes:
                self._lose([worker], self.death(worker, opcode))
        late = [worker for worker in workers if worker not in self.lost]
        if late and time.monotonic() >= deadline:
            self._lose(late, self._lateness(late, opcode, limit))

    def _lose(self, workers: list[int], error: WorkerDied | WorkerTimeout) -> None:
        """Takes workers for gone, and sees to it that they are: a late answer must never count.

        Raises:
            WorkerDied, WorkerTimeout: the error, unless this exchange gathers them.
        """
        self._launcher.look()  # a process that was just started may not be known yet
        for worker in workers:
            self._launcher.kill(worker, KILL)
        if not self._gathers:
            raise error
        if not self._launcher.wait_ended(workers, LOOK_SECONDS):
            for worker in workers:
                self._launcher.kill(worker, KILL)
        if not self._launcher.wait_ended(workers, _END_SECONDS):
            self.broken = True
            raise error
        for worker in workers:
            self.lost[worker] = error

    def revived(self, worker: int) -> None:
        """Takes a worker for alive again: another process stands in its place."""
        del self.lost[worker]

    def given_up(self, worker: int, error: WorkerDied | WorkerTimeout, opcode: Opcode) -> list[Fault]:
        """Ends the process that was to stand in a lost worker's place; the loss of its rows, as faults."""
        self._lose([worker], error)
        return self.faults_of([worker], opcode)

    def forget(self, worker: int) -> None:
        """Clears what a worker that is gone may have left of its doorbell."""
        empty(self._doorbells[worker])

    def death(self, worker: int, opcode: Opcode, wait: float = 1.0) -> WorkerDied:
        """What to say of a worker that has ended, or is about to: its channel is closed already."""
        launcher, rows = self._launcher, list(self._groups[worker])
        launcher.wait_ended([worker], wait)
        pid, code = launcher.pids.get(worker, -1), launcher.exitcodes.get(worker)
        error = WorkerDied(
            f"the worker process of {rows_in_words(rows)} (pid {pid}) {_end_in_words(code)} during {opcode.command!r}",
            rows,
            pid,
            code,
        )
        error.command = opcode.command
        return error

    def _lateness(self, workers: list[int], opcode: Opcode, limit: float) -> WorkerTimeout:
        rows = [row for worker in workers for row in self._groups[worker]]
        known = self._launcher.pids
        pids = ", ".join(str(known.get(worker, "not known yet")) for worker in workers)
        option = "build_timeout" if opcode in (Opcode.BUILD, Opcode.REBUILD) else "step_timeout"
        error = WorkerTimeout(
            f"{rows_in_words(rows)} (pid {pids}) did not finish {opcode.command!r} within {limit:g} s; raise {option} "
            "if they need longer",
            rows,
            limit,
            [known.get(worker, -1) for worker in workers for _ in self._groups[worker]],
        )
        error.command = opcode.command
        return error

    def faults_of(self, workers: Sequence[int], opcode: Opcode) -> list[Fault]:
        """The loss of these workers, as a fault of each of their rows."""
        return [
            Fault.of_loss(row, opcode.command, self.lost[worker], self._launcher.pids.get(worker, -1))
            for worker in workers
            for row in self._groups[worker]
        ]

    # Messages.

    def receive(self, worker: int, opcode: Opcode, deadline: float, limit: float, sequence: int = 0) -> Answer:
        """The message of a worker that belongs to a command; those that belong to earlier ones are dropped.

        Raises:
            WorkerDied, WorkerTimeout: it will not come.
            UnreadableMessage: it does not unpickle here.
        """
        patience = self.patience(worker, opcode, deadline, limit)
        try:
            while True:
                answered, message = self._channels[worker].receive(patience)
                if answered == sequence:
                    answer: Answer = message
                    return answer
        except (EOFError, OSError):
            raise self.death(worker, opcode) from None

    def patience(self, worker: int, opcode: Opcode, deadline: float, limit: float) -> Any:
        """What to do while a transfer to or from a worker stalls: look whether it lives, and at the clock."""

        def patience(sock: socket.socket, writing: bool) -> None:
            wait_for(sock, writing, LOOK_SECONDS)
            self.check([worker], opcode, deadline, limit)

        return patience

    def check(self, workers: list[int], opcode: Opcode, deadline: float, limit: float) -> None:
        """Looks after workers whose message is awaited.

        Raises:
            WorkerDied: one of them has ended.
            WorkerTimeout: the deadline has passed.
        """
        self._launcher.look()
        for worker in workers:
            if worker in self._launcher.exitcodes:
                raise self.death(worker, opcode)
        if workers and time.monotonic() >= deadline:
            raise self._lateness(workers, opcode, limit)


KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those of the sockets that have something to read, waiting at most so long for any."""
    if not hasattr(select, "poll"):
        return select.select(sockets, [], [], seconds)[0]
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [sock for sock in sockets if sock.fileno() in ready]


def rows_in_words(rows: Sequence[int]) -> str:
    """``row 3``, or ``rows 3, 4``."""
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {', '.join(map(str, rows))}"


def _end_in_words(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
