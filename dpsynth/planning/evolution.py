"""Private Evolution's settings (Lin et al. 2024), and the vote rounds that they make."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsynth.accounting.queries import VoteHistogram
from dpsynth.artifacts.votes import MOST_ROUNDS
from dpsynth.planning.section import PositiveFloat, PositiveInt, Section, misfit

Time = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Evolution(Section):
    """Populations of a public generator, moved towards the records by their votes.

    The defaults are those of StraightDP, Table 9.

    rounds: T vote histograms, each charged once.
    population: members of each class; declared, never read from the records.
    variations: a member is voted for by the mean feature of so many variations of it (lookahead,
        Lin et al. 2024, section 4); 0: by its own feature.
    times: flow times from which the first and the last round's variations are made anew, linear in
        between. A small time is a strong variation: the member is (1 - t) noise + t itself.
    threshold: votes below so many standard deviations of their noise count as none.
    spares: further slots of each round, for one that a crash forfeits.
    features: the public space in which "nearest" is said. `codes`: the plan's own representation;
        `lenet`: penultimate layer of a LeNet trained on the public images; `inception`: FID's
        network, where its weights are on this machine.
    """

    weight: PositiveFloat = 1.0
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 10
    population: PositiveInt = 1_000
    variations: Annotated[int, Field(ge=0, le=64)] = 2
    times: tuple[Time, Time] = Field((0.45, 0.85), strict=False)  # YAML has lists
    threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    spares: Annotated[int, Field(ge=0, le=3)] = 0
    features: Literal["codes", "lenet", "inception"] = "codes"

    @model_validator(mode="after")
    def _variations_grow_milder(self) -> "Evolution":
        if self.times[0] > self.times[1]:
            raise misfit(
                f"times go from {self.times[0]:g} down to {self.times[1]:g}: variations would "
                "grow stronger from round to round",
                "times",
                hint=f"times: [{self.times[1]:g}, {self.times[0]:g}]",
            )
        return self

    def strength(self, number: int) -> float:
        """Share of noise 1 - t in the variations of round `number`, counted from 1.

        >>> [round(Evolution(rounds=3).strength(number), 2) for number in (1, 2, 3)]
        [0.55, 0.35, 0.15]
        """
        first, last = self.times
        way = (number - 1) / max(1, self.rounds - 1)
        return 1.0 - (first + (last - first) * way)

    def releases(self, classes: int) -> list[tuple[str, VoteHistogram, float]]:
        """Name, statistic and share of 1/sigma^2 of each round, in order (docs/maths/votes.md, P4).

        >>> Evolution(rounds=2, population=50).releases(10)[0]
        ('votes-01', VoteHistogram(bins=500), 0.5)
        """
        statistic = VoteHistogram(bins=classes * self.population)
        return [(round_name(n), statistic, 1 / self.rounds) for n in range(1, self.rounds + 1)]


def round_name(number: int) -> str:
    """Name of a vote round's release, and of its file; `number` counts from 1."""
    return f"votes-{number:02d}"
