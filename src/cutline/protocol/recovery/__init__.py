"""How a flow recovers: facts in, plan or refusal out."""
