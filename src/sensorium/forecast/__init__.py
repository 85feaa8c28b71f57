"""What a recipe needs and how fast it is on other hardware: a cost model fitted to measurements, and a simulator."""
