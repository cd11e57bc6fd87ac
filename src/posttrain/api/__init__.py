"""The interface of Posttrain: the verbs of `Control`, the values that they return, and their JSON encoding."""
