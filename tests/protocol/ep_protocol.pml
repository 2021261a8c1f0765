/*
 * Promela model of the dispatch / combine protocol (docs/protocol.md).
 *
 * Default: N ranks, ROUNDS dispatch and combine rounds, for spin's exhaustive search.
 * -DGRID:  the second half of this file instead, the CTAs of one rank around its state words.
 *
 * Properties, as assertions and as "no invalid end state":
 *   (a) no payload cell is overwritten before its reader has finished with it
 *   (b) a reader that has passed its wait reads the whole data of its own epoch
 *   (c) nobody dies: no deadlock; no timeout is modelled, so none was needed
 *   (d) a rank dies: every other rank terminates, and announces no batch of which an item is missing
 *
 *   -DN=2|3 -DROUNDS=3 -DCHUNKS=1|2       size; with two chunks, round 2 is a shorter round of one chunk
 *   -DORDER=SPLIT|STREAM|ROLES|FUSED      which kernels of one rank may overlap, see below
 *   -DFINE                                words posted, and chunks read, one at a time in any order
 *   -DDEATH                               rank 0 stops for ever at some point; a wait for a word of a rank that is
 *                                         dead, or that has given up, may time out
 *   -DSLOW                                nobody dies, but any unsatisfied wait may time out at any moment
 *   -DDISPATCHES=0, -DCOMBINES=0          only the other phase
 *   -DMUTANT=...                          one protocol rule broken; the search must then find an error
 *
 * What is modelled, and why it is enough
 * --------------------------------------
 * Two processes a rank, Send and Receive, stand for the sending and receiving CTAs of its kernels.
 *
 * Payload. A payload cell (a routing table with its header and counts; a chunk of messages; a chunk of returns)
 * holds the epoch whose data it holds, or TORN while stores to it may be on their way. Stores are not ordered
 * among themselves, only before the flag that follows them (st.release.sys): they arrive at any moment between
 * the wait that precedes them and that flag, never after it. So the cells of ALL peers turn TORN in the step that
 * passes the wait (the earliest moment a store can arrive), and a cell turns to n in the step that posts its flag (the
 * latest). Every real arrival lies between, and a reader that looks in between fails an assertion. A slower CTA
 * of the same sender passes the same wait later, which only shortens the interval.
 *
 * Flags. A flag has one writer and one reading rank, only grows, and is only compared. Hence a post that arrives
 * late cannot be told from a reader that polls late, and a rank may post one item to all its peers in one step: the
 * readers' own steps supply every delay. The exception is a writer that stops between two posts, so the rank
 * that dies may stop after posting an item to any subset of its peers. -DFINE does without this reduction.
 *
 * Reads. A wait is followed by one check of the cell (the earliest read); one more check of all cells comes in the step
 * that posts "consumed" (the latest read). A cell that holds n at both moments held n in between, because epoch
 * n is written once. For the same reason the waits of several CTAs for the same monotonic words are one wait.
 *
 * Termination. Every step advances a process or a word and nothing goes back, so the state graph has no cycle:
 * "no invalid end state" is the proof that every process of every live rank terminates.
 */

#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif
#ifndef CHUNKS
#define CHUNKS 1
#endif

/* ORDER: the kernels of one rank. Operation k of either process is Dispatch or Combine of some round.
 * SPLIT   four launches a round on two streams: sends and receives overlap without limit
 * STREAM  four launches a round on one stream, two batches in flight:
 *         send D1, send D2, receive D1, send C1, receive D2, send D3, receive C1, ...
 * ROLES   fused launches, some CTAs send while others receive; the kernel ends when both have
 * FUSED   fused launches, every CTA sends and then receives */
#define SPLIT 0
#define STREAM 1
#define ROLES 2
#define FUSED 3
#ifndef ORDER
#define ORDER SPLIT
#endif
/* STREAM: operations sent before the first is received (three dispatches are one too many) */
#ifndef OUTSTANDING
#define OUTSTANDING 2
#endif
/* Dispatches sent before the first combine is: D1 D2 C1 D3 C2 C3 (1) or D1 C1 D2 C2 D3 C3 (0). */
#ifndef AHEAD
#define AHEAD (ORDER <= STREAM)
#endif
/* The two phases share no word of the arena; one alone is enough for the larger sizes. */
#ifndef DISPATCHES
#define DISPATCHES 1
#endif
#ifndef COMBINES
#define COMBINES 1
#endif

#define NONE 0
#define NO_CONSUMED_WAIT 1   /* senders do not wait before they overwrite */
#define ONE_PARITY 2         /* every round uses the same slots */
#define FLAG_FIRST 3         /* the flag is posted before the payload has arrived */
#define CONSUMED_EARLY 4     /* "consumed" is posted before the chunks are read */
#define EQUAL 5              /* receivers wait for flag == n, not flag >= n */
#define WAIT_PREVIOUS 6      /* senders wait for n-1, not n-2 */
#define ARENA_HEADER 7       /* combine reads the header from the arena, not from the handle */
#define ANNOUNCE_ANYWAY 8    /* the last CTA out does not look at the abort word */
#define STALE_OUTPUT 9       /* GRID: CTAs that find the abort word set leave without being counted */
#define OTHER_EPOCH 10       /* GRID: receiving CTAs read the epoch word of the sending role */
#define RECEIVERS_FIRST 11   /* GRID: receiving CTAs have the lower block indices, not all CTAs fit */
#ifndef MUTANT
#define MUTANT NONE
#endif

#ifndef GRID

#define TORN 255
#define ITEMS (CHUNKS + 1)   /* item 0: header, counts, entries, weights; item c: chunk c of messages or returns */
#define TABLE 0
#define chunks(n) (CHUNKS - ((CHUNKS > 1) && ((n) == 2)))
#define TOTAL ((DISPATCHES + COMBINES) * ROUNDS)

#if MUTANT == ONE_PARITY
#define parity(n) 0
#else
#define parity(n) ((n) & 1)
#endif

/* Arena words. D or C, then the rank that owns the memory, then the rank that writes. */
#define D 0
#define C 1
#define first(phase) (phase)   /* a dispatch begins with the table, a combine has none */
#define CELL(phase, owner, n, writer, item) \
    cell[((((phase) * N + (owner)) * 2 + parity(n)) * N + (writer)) * ITEMS + (item)]
#define FLAG(phase, owner, writer, item) flag[(((phase) * N + (owner)) * N + (writer)) * ITEMS + (item)]
#define CONSUMED(phase, owner, writer) consumed[((phase) * N + (owner)) * N + (writer)]
#define READ(phase, rank) read[(phase) * N + (rank)]

byte cell[2 * N * 2 * N * ITEMS];    /* D: header + counts + entries + weights, messages. C: -, returns. By parity */
byte flag[2 * N * N * ITEMS];        /* D: route_ready, message_ready.  C: -, return_ready */
byte consumed[2 * N * N];            /* dispatch_consumed, combine_consumed */
byte read[2 * N];                    /* ghost: last round that a rank has finished reading */

bool aborted[N];                     /* StateWord.ABORT */
byte sent[N], received[N];           /* operations that the rank's Send / Receive process has finished */

#if defined(DEATH)
#define DOOMED 0
bool dead;
#define gone(p) (aborted[p] || dead_rank(p))
#define dead_rank(p) (dead && (p) == DOOMED)
#elif defined(SLOW)
#define gone(p) true
#define dead_rank(p) false
#else
#define gone(p) false                /* no timeout: a wait that is never satisfied is an invalid end state */
#define dead_rank(p) false
#endif

#if N == 2
#define every(test) (test(0) && test(1))
#define some(test) (test(0) || test(1))
#else
#define every(test) (test(0) && test(1) && test(2))
#define some(test) (test(0) || test(1) || test(2))
#endif

#if MUTANT == NO_CONSUMED_WAIT
#define free_again(word) true
#elif MUTANT == WAIT_PREVIOUS
#define free_again(word) ((word) + 1 >= n)
#else
#define free_again(word) ((word) + 2 >= n)
#endif
#if MUTANT == EQUAL
#define arrived(word) ((word) == n)
#else
#define arrived(word) ((word) >= n)
#endif

#define d_free(p) free_again(CONSUMED(D, r, p))
#define c_free(p) free_again(CONSUMED(C, r, p))
#define routed(p) arrived(FLAG(D, r, p, TABLE))
#define d_late(p) (!d_free(p) && gone(p))
#define c_late(p) (!c_free(p) && gone(p))
#define route_late(p) (!routed(p) && gone(p))

/* Kernel launch: waits for its turn on the rank's streams; returns at once on a failed communicator. */
#if defined(DEATH) || defined(SLOW)
#define LAUNCH(turn) if :: aborted[r] || dead_rank(r) -> goto out :: !aborted[r] && !dead_rank(r) && (turn) fi
#define DEAD :: dead_rank(r) -> goto out
#else
#define LAUNCH(turn) (turn)
#define DEAD
#endif
#define GIVE_UP aborted[r] = true; goto out

/* ---- sending -------------------------------------------------------------------------------------------------- */

/* The step that passes the wait: from now on stores of round n may arrive, at any peer, in any order.
 * Property (a): whatever the slots held has been read, by each peer, up to and including round n-2. */
inline overwrite(phase) {
    p = 0;
    do
    :: p < N ->
        assert(READ(phase, p) + 2 >= n);
        i = first(phase);
        do
        :: i <= chunks(n) ->
            CELL(phase, p, n, r, i) = TORN;
#if MUTANT == FLAG_FIRST
            FLAG(phase, p, r, i) = n;
#endif
            todo = todo | (1 << (i * N + p));
            i++
        :: else -> break
        od;
        p++
    :: else -> break
    od;
    i = 0; p = 0
}

/* Payload has arrived, flag follows: item b / N at peer b % N. */
inline post(phase, b) {
    CELL(phase, (b) % N, n, r, (b) / N) = n;
    FLAG(phase, (b) % N, r, (b) / N) = n;
    todo = todo & ~(1 << (b))
}

/* The rank that dies posts item i to some of its peers and then nothing more, for ever. */
inline stop_half_way(phase) {
    do
    :: todo & (1 << i) -> break
    :: else -> i++
    od;
    do
    :: p < N -> p++
    :: p < N -> post(phase, i + p); p++
    :: p == N -> break
    od;
    i = 0; p = 0; todo = 0;
    dead -> goto out
}

/* Posts all of `todo`: item by item to all peers at once or, -DFINE, one word at a time in any order. */
inline post_all(phase) {
    do
    :: todo == 0 -> break
    DEAD
#ifdef FINE
    :: atomic { todo != 0 && !dead_rank(r) ->
        do
        :: (todo & (1 << i)) -> break
        :: (todo >> (i + 1)) != 0 -> i++
        od;
        post(phase, i);
        i = 0 }
#else
    :: d_step { todo != 0 && !dead_rank(r) ->
        do
        :: !(todo & (1 << i)) -> i++
        :: else -> break
        od;
        p = i + N;
        do
        :: i < p -> post(phase, i); i++
        :: else -> break
        od;
        i = 0; p = 0 }
#endif
#if defined(DEATH) && !defined(FINE)
    :: atomic { r == DOOMED && todo != 0 && !dead -> stop_half_way(phase) }
#endif
    od
}

#if ORDER == SPLIT
#define SENT skip
#define RECEIVED skip
#else
#define SENT sent[r]++
#define RECEIVED received[r]++
#endif
#if ORDER == SPLIT
#define may_send true
#define may_receive true
#elif ORDER == STREAM
#define may_send (received[r] + OUTSTANDING > sent[r])
#define may_receive (sent[r] >= received[r] + OUTSTANDING || sent[r] == TOTAL)
#elif ORDER == ROLES
#define may_send (received[r] >= sent[r])
#define may_receive (sent[r] >= received[r])
#else
#define may_send (received[r] >= sent[r])
#define may_receive (sent[r] > received[r])
#endif

proctype Send(byte r) {
    byte round = 1, n, p, i;
    short todo;
    do
    :: round <= ROUNDS + AHEAD ->
        if
        :: DISPATCHES && round <= ROUNDS ->
            n = round;
            LAUNCH(may_send);
            if
            :: d_step { !dead_rank(r) && every(d_free) -> overwrite(D) }
            :: some(d_late) -> GIVE_UP
            DEAD
            fi;
            post_all(D);
            SENT
        :: else
        fi;
        if
        :: COMBINES && round > AHEAD ->
            n = round - AHEAD;
            LAUNCH(may_send && (READ(D, r) >= n || !DISPATCHES));   /* the handle of dispatch n */
            if
            :: d_step { !dead_rank(r) && every(c_free) -> overwrite(C) }
            :: some(c_late) -> GIVE_UP
            DEAD
            fi;
#if MUTANT == ARENA_HEADER
            p = 0;
            do
            :: p < N -> assert(CELL(D, r, n, p, TABLE) == n); p++
            :: else -> p = 0; break
            od;
#endif
            post_all(C);
            SENT
        :: else
        fi;
        round++
    :: else -> break
    od
out: skip
}

/* ---- receiving ------------------------------------------------------------------------------------------------ */

/* Property (b): the data of the reader's own epoch, whole. */
inline check(phase) {
    p = 0;
    do
    :: p < N ->
        i = first(phase);
        do
        :: i <= chunks(n) -> assert(CELL(phase, r, n, p, i) == n); i++
        :: else -> break
        od;
        p++
    :: else -> break
    od;
    i = 0; p = 0
}

inline post_consumed(phase) {
    p = 0;
    do
    :: p < N -> CONSUMED(phase, p, r) = n; p++
    :: else -> p = 0; break
    od
}

/* Takes the items (source b % N, chunk b / N + 1), in order, or with -DFINE in any order. An item whose source
 * is gone is lost, and the CTAs of the other items go on. */
#ifdef FINE
#define next(b) (todo & (1 << (b)))
#define others(b) (todo & ~(1 << (b)))
#else
#define others(b) 0
#define next(b) ((todo & ((2 << (b)) - 1)) == (1 << (b)))
#endif
#define here(phase, b) arrived(FLAG(phase, r, (b) % N, (b) / N + 1))
#define TAKE(phase, b) \
    :: d_step { next(b) && !dead_rank(r) && here(phase, b) -> \
        assert(CELL(phase, r, n, (b) % N, (b) / N + 1) == n); todo = todo & ~(1 << (b)) } \
    :: d_step { next(b) && !dead_rank(r) && !here(phase, b) && gone((b) % N) -> \
        aborted[r] = true; lost = true; todo = others(b) }

inline take_all(phase) {
    todo = (1 << (N * chunks(n))) - 1;
    do
    :: todo == 0 -> break
    DEAD
    TAKE(phase, 0)
    TAKE(phase, 1)
#if N * CHUNKS > 2
    TAKE(phase, 2)
#endif
#if N * CHUNKS > 3
    TAKE(phase, 3)
#endif
#if N * CHUNKS > 4
    TAKE(phase, 4)
    TAKE(phase, 5)
#endif
    od
}

/* The last CTA out. Property (d): it announces a batch (num_rows, "consumed") only when every item was taken. */
#if MUTANT == ANNOUNCE_ANYWAY
#define FAILED false
#else
#define FAILED aborted[r]
#endif
inline finish(phase) {
    if
    :: FAILED || dead_rank(r) -> goto out
#if MUTANT == CONSUMED_EARLY
    :: d_step { !FAILED -> check(phase); READ(phase, r) = n; RECEIVED }
#elif defined(FINE)
    :: d_step { !FAILED && !dead_rank(r) -> assert(!lost); check(phase); READ(phase, r) = n; todo = (1 << N) - 1 }
        do
        :: d_step { todo == 0 -> RECEIVED } break
        DEAD
        :: d_step { todo & 1 && !dead_rank(r) -> CONSUMED(phase, 0, r) = n; todo = todo & ~1 }
        :: d_step { todo & 2 && !dead_rank(r) -> CONSUMED(phase, 1, r) = n; todo = todo & ~2 }
#if N > 2
        :: d_step { todo & 4 && !dead_rank(r) -> CONSUMED(phase, 2, r) = n; todo = todo & ~4 }
#endif
        od
#else
    :: d_step { !FAILED && !dead_rank(r) ->
        assert(!lost); check(phase); READ(phase, r) = n; post_consumed(phase); RECEIVED }
#ifdef DEATH
    :: atomic { r == DOOMED && !FAILED && !dead -> READ(phase, r) = n;
        do
        :: p < N -> p++
        :: p < N -> CONSUMED(phase, p, r) = n; p++
        :: p == N -> p = 0; break
        od;
        dead -> goto out }
#endif
#endif
    fi
}

proctype Receive(byte r) {
    byte round = 1, n, p, i;
    short todo;
    bool lost;
    do
    :: round <= ROUNDS + AHEAD ->
        if
        :: DISPATCHES && round <= ROUNDS ->
            n = round;
            LAUNCH(may_receive);
            if
            :: d_step { !dead_rank(r) && every(routed) ->            /* counts give the row bases, headers the chunks */
                p = 0;
                do
                :: p < N -> assert(CELL(D, r, n, p, TABLE) == n); p++
                :: else -> p = 0; break
                od }
            :: some(route_late) -> GIVE_UP
            DEAD
            fi;
#if MUTANT == CONSUMED_EARLY
            d_step { post_consumed(D) };
#endif
            take_all(D);
            finish(D)
        :: else
        fi;
        if
        :: COMBINES && round > AHEAD ->
            n = round - AHEAD;
            LAUNCH(may_receive);
#if MUTANT == CONSUMED_EARLY
            d_step { post_consumed(C) };
#endif
            take_all(C);
            finish(C)
        :: else
        fi;
        round++
    :: else -> break
    od
out: skip
}

#ifdef DEATH
active proctype Death() { dead = true }
#endif

init {
    atomic {
        run Send(0); run Receive(0);
        run Send(1); run Receive(1);
#if N > 2
        run Send(2); run Receive(2);
#endif
    }
}

#else  /* GRID */

/* ---- the CTAs of one rank ------------------------------------------------------------------------------------- *
 *
 * ROUNDS fused dispatch kernels of one rank, in stream order. With -DORDER=ROLES the first SENDERS CTAs send and the
 * others receive; with -DORDER=FUSED all SENDERS CTAs send and then receive. At most SLOTS CTAs are resident, started
 * in the order of their block index. Peers are left out: they behave like the rank's own sending CTAs.
 *
 *   every CTA of launch n works on epoch n, however late it starts
 *   route_ready is posted by the CTA that arrives last, after the table stores of all sending CTAs
 *   when the kernel has ended, num_rows is n, or 0 after a timeout (-DSLOW: any wait may time out)
 */
#ifndef SENDERS
#define SENDERS 2
#endif
#if ORDER == FUSED
#define GRIDSIZE SENDERS
#define RECEIVERS SENDERS
#define sends(id) true
#define receives(id) true
#else
#define RECEIVERS 2
#define GRIDSIZE (SENDERS + RECEIVERS)
#if MUTANT == RECEIVERS_FIRST
#define sends(id) ((id) >= RECEIVERS)
#else
#define sends(id) ((id) < SENDERS)
#endif
#define receives(id) (!sends(id))
#endif
#ifndef SLOTS
#define SLOTS GRIDSIZE
#endif

byte send_epoch, receive_epoch, send_done, receive_done, route_done;    /* the state words */
bool abort_word;
byte num_rows;                                  /* ghost: the epoch whose rows were announced, 0 for none */
byte table[GRIDSIZE], message[GRIDSIZE];        /* the share of each sending CTA */
byte route_ready, message_ready[GRIDSIZE];
byte resident;

#ifdef SLOW
#define TIMEOUT :: abort_word = true; failed = true
#else
#define TIMEOUT
#endif

proctype Cta(byte id; byte launch) {
    byte n, i;
    bool failed, last;
    failed = abort_word;
#if MUTANT == STALE_OUTPUT
    if
    :: failed -> goto out
    :: !failed
    fi;
#endif
    if
    :: sends(id) ->
        n = send_epoch + 1;
        assert(n == launch);
        if
        :: !failed ->
            table[id] = n;
            d_step { route_done++; last = (route_done == SENDERS) };      /* atomic add, acquire and release */
            if
            :: last ->
                d_step {
                    do
                    :: i < GRIDSIZE -> assert(!sends(i) || table[i] == n); i++
                    :: else -> i = 0; break
                    od
                };
                route_done = 0;
                route_ready = n
            :: !last
            fi;
            message[id] = n;
            message_ready[id] = n
        :: failed
        fi;
        d_step { send_done++; last = (send_done == SENDERS) };
        if
        :: last -> send_done = 0; send_epoch = n
        :: !last
        fi
    :: else
    fi;
    if
    :: receives(id) ->
#if MUTANT == OTHER_EPOCH
        n = send_epoch + 1;
#else
        n = receive_epoch + 1;
#endif
        assert(n == launch);
        if
        :: !failed && route_ready >= n
        :: failed
        TIMEOUT
        fi;
        do
        :: failed || i == GRIDSIZE -> i = 0; break
        :: !failed && i < GRIDSIZE && !sends(i) -> i++
        :: !failed && i < GRIDSIZE && sends(i) && message_ready[i] >= n -> assert(message[i] == n); i++
        TIMEOUT
        od;
        skip;
        d_step { receive_done++; last = (receive_done == RECEIVERS) };
        if
        :: last ->
            num_rows = (abort_word -> 0 : n);
            receive_done = 0;
            receive_epoch = n
        :: !last
        fi
    :: else
    fi;
out:
    resident--
}

init {
    byte launch = 1, id;
    do
    :: launch <= ROUNDS ->
        do
        :: id < GRIDSIZE -> atomic { resident < SLOTS -> resident++; run Cta(id, launch); id++ }
        :: else -> id = 0; break
        od;
        resident == 0;
        assert(num_rows == (abort_word -> 0 : launch));
        assert(send_done == 0 && receive_done == 0);
        launch++
    :: else -> break
    od
}

#endif
