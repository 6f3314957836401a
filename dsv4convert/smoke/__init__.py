"""Questions to a running server, and what its answers prove.

    server     one server: its pages, its key, whether it is alive
    answers    what every protocol answers, in one form
    protocols  Chat, Responses and Messages, through the official clients
    bodies     their requests as JSON
    encoding   how the server encodes pictures, and how long the official layout makes a prompt
    ties       whether two greedy answers differ by a tie or by a fault
    checks     what is asked; each check says what it asserts
    suite      all checks of a suite, in order, and their report
    bench      a serving benchmark: SGLang's own client, run so that its numbers can be compared

Nothing here needs weights, a GPU or SGLang; `bench` runs SGLang's benchmark client as a process.
"""
