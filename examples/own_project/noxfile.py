from torchwheels.sessions import add_sessions

add_sessions()
