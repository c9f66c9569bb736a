"""Print the lowest versions that setup.cfg allows of what the package requires, for pip -c."""

import configparser
from pathlib import Path

config = configparser.ConfigParser()
config.read(Path(__file__).parents[1] / "setup.cfg")
print(config["options"]["install_requires"].replace(">=", "==").strip())
