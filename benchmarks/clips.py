"""Speaks texts into WAV files with their words beside, for `speech.py`.

    python benchmarks/clips.py clips

writes 16 pairs of NAME.wav and NAME.txt: 3 to 50 seconds, several voices of espeak-ng,
which must be installed. The sound is synthetic: error rates tell methods apart, and
nothing about people.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import click


@dataclass(frozen=True)
class Clip:
    """A text and who says it: a voice of espeak-ng, words a minute."""

    name: str
    voice: str
    speed: int
    text: str


CLIPS = (
    Clip("command", "en-us", 150, "Turn on the light in the kitchen."),
    Clip("music", "en-gb+f3", 140, "Play the song that we heard last night, please."),
    Clip(
        "route",
        "en-us+m3",
        160,
        "Drive to the end of the road, turn left at the church, and follow the river "
        "until you reach the old bridge.",
    ),
    Clip(
        "weather",
        "en-gb",
        150,
        "Tomorrow will be cloudy in the morning with a little rain near the coast. In "
        "the afternoon the sun comes out, and the wind turns to the west.",
    ),
    Clip(
        "kitchen",
        "en-us+f4",
        155,
        "Boil the water, add a spoon of salt, and cook the pasta for nine minutes. "
        "Keep a cup of the water for the sauce. Then fry the garlic in olive oil.",
    ),
    Clip(
        "doctor",
        "en-gb-x-rp",
        150,
        "The patient has had a fever since Monday. Her blood pressure is normal, and "
        "there is no pain in the chest. Give her plenty of water and call me again if "
        "the fever does not fall.",
    ),
    Clip(
        "news",
        "en-us",
        175,
        "The city council voted last night to build a new library beside the station. "
        "The work will begin in spring and take about two years. Critics say that the "
        "money should have gone to schools and to the repair of roads.",
    ),
    Clip(
        "machine",
        "en-gb-scotland",
        150,
        "Before you open the machine, pull the plug and wait until the motor stands "
        "still. Remove the four screws at the back. Lift the cover, and clean the "
        "filter with a dry brush.",
    ),
    Clip(
        "history",
        "en-gb+f2",
        160,
        "The first railways carried coal from the mines to the sea. Horses pulled the "
        "waggons until steam engines became strong enough. Within thirty years, "
        "people travelled between the large cities in a few hours.",
    ),
    Clip(
        "science",
        "en-us+m5",
        155,
        "Light from the sun takes about eight minutes to reach the earth. The nearest "
        "other star is so far away that its light needs more than four years. When we "
        "look at the sky, we see the past.",
    ),
    Clip(
        "bank",
        "en-us+f2",
        165,
        "Your account was closed last winter, because the card had been stolen. The "
        "new card is on its way to you. Would you like to hear your last payments, or "
        "to speak with a person?",
    ),
    Clip(
        "farm",
        "en-gb-x-gbclan",
        150,
        "We milk the cows twice a day, early in the morning and again in the evening. "
        "In summer they stay on the meadow behind the house. The milk goes to a small "
        "dairy in the next village.",
    ),
    Clip(
        "garden",
        "en-us",
        140,
        "Plant the beans after the last frost. Put two seeds into each hole, as deep "
        "as your thumb, and give them a stick to climb. Water them in the evening "
        "when the ground is dry.",
    ),
    Clip(
        "meeting",
        "en-gb+m2",
        165,
        "Thank you all for coming. We have three things to talk about today. The "
        "first is the plan for the next quarter. The second is the new office, which "
        "should be ready in June. The third is the report that our customers asked "
        "for. Anna will begin, and after that we have time for questions.",
    ),
    Clip(
        "story",
        "en-gb+f5",
        150,
        "Once there was a fisherman who lived alone on a small island. Every morning "
        "he rowed out before the sun rose, and every evening he came back with his "
        "nets. One day a storm broke his boat in two. He held on to a piece of wood "
        "for a whole night. In the morning a ship from a far country found him. The "
        "captain gave him dry clothes and asked him where he wanted to go. The "
        "fisherman looked at the sea for a long time. Then he said that he wanted to "
        "go home.",
    ),
    Clip(
        "lecture",
        "en-us+m7",
        155,
        "A small computer has to read all the weights of a language model for every "
        "word that it writes. Reading memory takes most of the time, and the "
        "processor waits. If a second and smaller model guesses the next words, the "
        "large model can check several of them at once. Where the guess was right, "
        "the words cost one reading of the memory instead of many. Where it was "
        "wrong, the large model writes its own word, and nothing is lost but a little "
        "time. So the text is the same as before. How much faster it becomes depends "
        "on how often the small model is right, and on how much its own guesses cost.",
    ),
)


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
def main(output: Path) -> None:
    """Write the clips into a folder."""
    output.mkdir(parents=True, exist_ok=True)
    for clip in CLIPS:
        file = output / f"{clip.name}.wav"
        command = ["espeak-ng", "-v", clip.voice, "-s", str(clip.speed)]
        subprocess.run([*command, "-w", str(file), clip.text], check=True)
        file.with_suffix(".txt").write_text(clip.text + "\n")
    click.echo(f"{output}: {len(CLIPS)} clips")


if __name__ == "__main__":
    main()
