"""What can be asked of Posttrain, the `Control` protocol, and the values it answers with. HTTP is to stand here."""
