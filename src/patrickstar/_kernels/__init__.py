"""Update rules, and the eager, C++ and Triton backends that apply them."""
