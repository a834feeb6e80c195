"""`textarena:GAME`: a game of the package textarena."""

from __future__ import annotations

from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.games import Game, Messages, Outcome, Player, SeededTask, check_known, imported, need, users

MODEL = 0  # the model's seat


class TextArenaGame(Game):
    """A game in which the model is player 0, and `opponent` plays the others."""

    def __init__(self, library: Any, game: Any, num_players: int, opponent: Player | None) -> None:
        self.game, self.num_players, self.opponent = game, num_players, opponent
        self.env = game
        while isinstance(
            self.env, library.Wrapper
        ):  # observations are read without wrappers, which repeat earlier ones
            self.env = self.env.env

    def reset(self, problem: Problem) -> Messages:
        self.game.reset(num_players=self.num_players, seed=problem.info["seed"])
        self._play_others(done=False)
        return users(self._observation())

    def step(self, text: str) -> Outcome:
        done, _ = self.game.step(text)
        if not self._play_others(done):
            return Outcome(users(self._observation()))
        rewards, _ = self.game.close()
        return Outcome((), float((rewards or {}).get(MODEL, 0.0)), over=True)

    def _play_others(self, done: bool) -> bool:
        """Let the others play until it is the model's turn; whether the game is over."""
        while not done and self.env.state.current_player_id != MODEL:
            if self.opponent is None:
                raise KeelError("it is another player's turn: give task.opponent=module:attr")
            done, _ = self.game.step(self.opponent(self.env, self._observation()))
        return bool(done)

    def _observation(self) -> str:
        """What is new to the player whose turn it is, without its own moves."""
        player, messages = self.env.get_observation()
        names = self.env.state.role_mapping
        return "\n".join(
            f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in messages if sender != player
        )


def textarena(
    game: str,
    player: str | None = None,
    opponent: str | None = None,
    num_players: int | None = None,
    view: str | None = None,
    success: float = 1.0,
    **params: Any,
) -> SeededTask:
    """A game of textarena, with its own parameters beside these; the model is player 0.

    `player`, `opponent` and `view` are functions, `module:attr`: `player(env, observation)` gives the next turn of a
    demonstration, `opponent(env, observation)` the move of each other player, `view(text)` what the model reads of an
    observation. `num_players` is 1 without an opponent and 2 with one. A reward of `success` counts as correct.
    """
    library = need("textarena", f"textarena:{game}", "textarena")
    registry = library.envs.registration.ENV_REGISTRY
    check_known("textarena", game, registry, "textarena.pprint_registry_detailed()")
    others: Player | None = imported("opponent", opponent)
    count = num_players or (1 if others is None else 2)
    task = SeededTask(
        f"textarena:{game}",
        lambda problem: TextArenaGame(library, library.make(game, **params), count, others),
        imported("player", player),
        imported("view", view),
        success,
        advice=""
        if num_players
        else f" (with {count} players: task.num_players and task.opponent say how many and who plays)",
    )
    task.check()
    return task
