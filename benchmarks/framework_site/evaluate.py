"""Stand-in for the package evaluate, whose metrics are on the hub: accuracy alone."""


class Accuracy:
    def __init__(self) -> None:
        self.right: list[bool] = []

    def add_batch(self, predictions, references) -> None:
        self.right += [bool(each) for each in predictions == references]

    def compute(self) -> dict[str, float]:
        right, self.right = self.right, []
        return {"accuracy": sum(right) / len(right), "f1": 0.0}


def load(*names: str) -> Accuracy:
    return Accuracy()
