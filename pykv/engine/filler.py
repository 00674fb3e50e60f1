"""Plain sentences in any number, in which a needle is hidden when no text was given: data only."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

_WHO = (
    "the baker", "our neighbour", "a retired teacher", "the postman", "my aunt", "the ferryman",
    "a young carpenter", "the librarian", "the old gardener", "a travelling musician",
    "the night porter", "a doctor from the valley", "the beekeeper", "her cousin", "the tailor",
    "a tired clerk", "the lighthouse keeper", "the potter", "a visiting student", "the miller",
)  # fmt: skip
_WHEN = (
    "in the morning", "on Sundays", "after the rain", "before lunch", "late in autumn",
    "when the market closes", "at the end of the week", "in early spring", "around noon",
    "as soon as the shops open", "on warm evenings", "during the first snow", "every other day",
    "once the harvest is over", "long before sunrise", "whenever the wind turns",
)  # fmt: skip
_WHERE = (
    "by the river", "behind the station", "near the old bridge", "on the hill", "in the garden",
    "beside the chapel", "at the edge of the forest", "in the narrow street", "under the arcades",
    "at the harbour", "in the back room", "next to the school", "across the square",
    "along the canal", "in the courtyard", "below the vineyard",
)  # fmt: skip
_SENTENCES = (
    "{who} likes to sit {where} {when}.",
    "{when}, the light {where} turns soft and yellow.",
    "Nobody remembers who planted the walnut trees {where}.",
    "{who} repairs clocks and does not hurry.",
    "A cart with two wheels stood {where}, and nobody asked whose it was.",
    "{when}, {who} opens the windows and lets the cool air in.",
    "The bread was still warm when {who} carried it home.",
    "Some people walk {where} only to hear the water.",
    "{who} keeps a box of letters that were never sent.",
    "There is a bench {where} with a fine view of the roofs.",
    "{when}, children fly kites {where}.",
    "{who} says that soup tastes better on the second day.",
    "A grey cat sleeps {where} and pays no attention to visitors.",
    "The map on the wall shows roads that have long been gone.",
    "{who} counted the steps of the tower and then counted them again.",
    "{when}, the whole village smells of apples.",
    "It takes an hour on foot, or less if one knows the path {where}.",
    "{who} learned to swim late in life and now swims every day.",
    "The paint on the gate {where} has faded to a pale green.",
    "{who} lends tools to anyone who brings them back clean.",
    "Rain fell for three days, and the cellar stayed dry all the same.",
    "{when}, {who} sells honey {where}.",
    "A small orchestra plays {where}, mostly waltzes and marches.",
    "{who} could never decide between tea and coffee.",
    "The train stops here for a minute, and then it is quiet again.",
    "{when}, fog lies {where} and hides the fences.",
    "{who} wrote a short book about mosses, which sold rather well.",
    "The shop {where} sells buttons, thread and good advice.",
    "Two brothers built the boat, and {who} gave it a name.",
    "{who} prefers the longer way home, past the ponds.",
    "Swallows come back to the barn {where} each year.",
    "{when}, the streets are swept and the tables are put outside.",
    "A good ladder, {who} says, is worth more than a good hammer.",
    "The well {where} is deep, and its water is very cold.",
    "{who} once walked to the sea and back in nine days.",
    "Most of the houses have slate roofs and small front doors.",
    "{when}, one can hear the bells from the next valley.",
    "{who} grows beans, onions and a few stubborn tomatoes.",
    "The theatre {where} has only forty seats, and all of them creak.",
    "{who} paints doors in summer and carves spoons in winter.",
    "There was a long talk about the new roof, and no decision.",
    "{when}, {who} feeds the ducks {where}.",
    "An old film was shown {where}, and half the town came.",
    "{who} knows every mushroom by its smell.",
    "The stairs are steep, so deliveries are left {where}.",
    "{who} found a coin under the floor and kept it for luck.",
    "{when}, the fishermen mend their nets and argue about the weather.",
    "A letter with foreign stamps lay {where} for a week.",
    "{who} has a laugh that can be heard through two walls.",
    "The path {where} is muddy, but it is the prettiest of all.",
    "{who} taught a parrot to whistle, and regretted it.",
    "{when}, there is music {where} and nobody goes to bed early.",
    "Wool from these sheep is rough, yet it lasts for decades.",
    "{who} reads the newspaper from the last page to the first.",
    "A stone wall {where} marks where the town once ended.",
    "{who} cooks for twelve even when only four are coming.",
    "{when}, the lamps {where} are lit one after another.",
    "The choir practises on the upper floor, and {who} listens from below.",
    "{who} keeps spare umbrellas for people who forget theirs.",
    "Wood is stacked {where} in neat rows, ready for the cold months.",
)


def sentences(random: Random) -> Iterator[str]:
    """Sentences without an end; all forms come once before one comes again."""
    while True:
        for form in random.sample(_SENTENCES, len(_SENTENCES)):
            filled = form.format(
                who=random.choice(_WHO), when=random.choice(_WHEN), where=random.choice(_WHERE)
            )
            yield filled[0].upper() + filled[1:]
