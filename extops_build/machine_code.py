"""Finds loads from shared memory that are in flight when a kernel lets others overwrite what they read.

A warp that is done with a part of shared memory says so: it arrives at an mbarrier or at the cluster's barrier, raises
a counter in global memory, or sends to another block. Then a copy by TMA, or another block, may store there. What the
warp has loaded must have come by then, and nothing in PTX says so: the order of a warp's instructions is kept among its
own accesses to shared memory, not among those and the copies (the "async proxy"). Whether it has come is in the machine
code alone. A load names one of six scoreboards, and an instruction has a mask of those that it waits for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from extops_build import UserError

_FUNCTION = re.compile(r"^\s*Function : (\w+)", re.MULTILINE)
# `/*0040*/ @!P0 BRA 0x1230 ; /* 64 bits */` and, in the next line, the other 64 bits of the instruction.
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[\w.]+)(?P<operands>[^;]*);"
    r"\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x(?P<control>[0-9a-f]{16}) \*/"
)
# Where the control code of Volta and later GPUs has the scoreboard that a load sets, and the mask of the wait.
_SCOREBOARD_BIT, _WAIT_BIT = 46, 52
_NO_SCOREBOARD = 7

_LOADS = ("LDS", "ATOMS")
_RELEASES = ("SYNCS.ARRIVE", "UCGABAR_ARV", "STAS", "UBLKCP", "RED", "ATOMG")
# Waits until all memory accesses of the thread have been performed (PTX: membar, and the fences made of it).
_FENCE = "MEMBAR"
_JUMPS = ("BRA", "JMP", "CALL", "WARPSYNC.COLLECTIVE")
_ENDS = ("EXIT", "RET")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel. `scoreboard` is the one that it sets; of `waits`, bit k is for scoreboard k."""

    address: int
    always: bool
    name: str
    operands: str
    scoreboard: int
    waits: int

    @property
    def is_load(self) -> bool:
        """Whether it loads from shared memory."""
        return self.name.startswith(_LOADS) and self.scoreboard != _NO_SCOREBOARD


def releases_with_loads_in_flight(listing: str) -> Iterator[str]:
    """The functions of cuobjdump's listing that break the rule, each with the first place where it does."""
    _, *parts = _FUNCTION.split(listing)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        code = [_instruction(match) for match in _INSTRUCTION.finditer(text)]
        if not code:
            raise UserError(f"cuobjdump lists {name} in a form that machine_code.py cannot read")
        place = _first_violation(code)
        if place is not None:
            yield f"{name} ({place})"


def _instruction(match: re.Match[str]) -> Instruction:
    control = int(match["control"], 16)
    return Instruction(
        address=int(match["address"], 16),
        always=match["guard"] is None,
        name=match["name"],
        operands=match["operands"],
        scoreboard=control >> _SCOREBOARD_BIT & 7,
        waits=control >> _WAIT_BIT & 63,
    )


def _next(code: list[Instruction], index: dict[int, int], at: int) -> Iterator[int]:
    """The places to which the instruction at place `at` may lead."""
    instruction = code[at]
    goes_on = True
    if instruction.name.startswith(_JUMPS):
        target = re.search(r"0x([0-9a-f]+)\s*$", instruction.operands)
        if target and int(target[1], 16) in index:
            yield index[int(target[1], 16)]
        # `BRA P1, 0x…` and BRA.DIV have a condition, too.
        is_unconditional = instruction.name == "BRA" and "," not in instruction.operands
        goes_on = not (instruction.always and is_unconditional)
    elif instruction.name.startswith(_ENDS):
        goes_on = not instruction.always
    if goes_on and at + 1 < len(code):
        yield at + 1


def _first_violation(code: list[Instruction]) -> str | None:
    """Follows each load along all paths until its scoreboard is waited for, or a fence waits for all."""
    index = {instruction.address: at for at, instruction in enumerate(code)}
    in_flight: dict[int, frozenset[int]] = {0: frozenset()}  # the loads before each place
    todo = [0]
    while todo:
        at = todo.pop()
        instruction = code[at]
        loads = {x for x in in_flight[at] if not instruction.waits >> code[x].scoreboard & 1}
        if instruction.name.startswith(_FENCE):
            loads.clear()
        if loads and instruction.name.startswith(_RELEASES):
            load = code[min(loads)]
            return (
                f"{instruction.name} at {instruction.address:#x} does not wait for scoreboard "
                f"{load.scoreboard} of {load.name} at {load.address:#x}"
            )
        if instruction.is_load:
            loads.add(at)
        for place in _next(code, index, at):
            known = in_flight.get(place)
            if known is None or not loads <= known:
                in_flight[place] = (known or frozenset()) | loads
                todo.append(place)
    return None
