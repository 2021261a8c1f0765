/*
 * Promela model of the pipelines of combine that add up (kernels/combine/pipeline.py, produce.py, piped_schedule.py):
 * one round of N ranks, whose rows all come home with flags.
 *
 * Properties, as assertions and as "no invalid end state":
 *   (a) every span is sent once, and every run is added up once
 *   (b) a run is added up when the spans of all other ranks that belong to it were signaled
 *   (c) every pipeline ends
 *
 *   -DN=2|3 -DPIPES=2 -DFIRST=2     ranks, pipelines of each, and of rank 0
 *   -DSPANS=2 -DRUNS=2              spans of each source, runs of each rank; run r belongs to the spans number r % SPANS
 *   -DALONE                         only rank 0 has tokens: the others send and add up nothing of their own
 *   -DMUTANT=...                    one rule broken; the search must then find an error
 *
 * A process is the producer of a pipeline. What it puts into its ring comes out in order, without a wait for a peer, so
 * a span is sent and signaled in one step, as late as any. A pipeline that finds that a run is not there may have looked
 * any number of times: the moments of its looks are free. Ranks begin at any moment.
 */

#ifndef N
#define N 2
#endif
#ifndef PIPES
#define PIPES 2
#endif
#ifndef FIRST
#define FIRST PIPES
#endif
#ifndef SPANS
#define SPANS 2
#endif
#ifndef RUNS
#define RUNS SPANS
#endif

#define NONE 0
#define HELD_SPAN 1      /* a pipeline that could add up draws a span, and waits for its run instead of sending it */
#define ONE_COUNTER 2    /* runs are dealt out by the counter of spans */
#define ONE_FLAG 3       /* of a source's spans only the first is signaled */
#define UNAWAITED 4      /* a run is added up although it is not there */
#define WAITS_FIRST 5    /* all pipelines begin with runs, and wait for them while spans are left */
#ifndef MUTANT
#define MUTANT NONE
#endif

#define SOURCES (N - 1)
#define BEGIN(p) (MUTANT != WAITS_FIRST && (p) % N != N - 1)
#define NUMBER(p) ((p) - (p) / N)
#define PIPES_OF(i) ((i) == 0 -> FIRST : PIPES)
#define SENDERS NUMBER(PIPES_OF(i))
#define STARTS (SOURCES < SENDERS -> SOURCES : SENDERS)
#define START(p) ((BEGIN(p) -> NUMBER(p) : (p) / N) % SOURCES)
#define ITEMS (SPANS * SOURCES)
#define MOST (ITEMS > RUNS -> ITEMS : RUNS)
#define ITEM(ticket, start) (SENDERS + (ticket) * STARTS + (start))
#define COUNTER(i, start) counters[(i) * N + (start)]
#define RUN_TURN (MUTANT == ONE_COUNTER -> 0 : N - 1)
#define FLAG(home, rank, number) flags[((home) * N + (rank)) * SPANS + (number)]

#ifdef ALONE
#define HAS(i) ((i) == 0)
#else
#define HAS(i) true
#endif
#define RUNS_OF(i) (HAS(i) -> RUNS : 0)

byte counters[N * N];        /* of rank, by start; the last one's deals out runs */
bool flags[N * N * SPANS];   /* at rank, of rank, number of its span */
bool sent[N * N * SPANS], added[N * RUNS], told[N];
byte ended;

/* Whether the spans of all other ranks that belong to a run of rank i were signaled. */
#define CAME(i, k, r) ((i) == (k) || FLAG(i, k, (r) % SPANS))
#if N == 2
#define IS_THERE(i, r) (CAME(i, 0, r) && CAME(i, 1, r))
#define ALL_TOLD (told[0] && told[1])
#else
#define IS_THERE(i, r) (CAME(i, 0, r) && CAME(i, 1, r) && CAME(i, 2, r))
#define ALL_TOLD (told[0] && told[1] && told[2])
#endif

/* Behind all items and runs a counter may as well stand. */
inline take(number) {
    if
    :: COUNTER(i, number) < MOST -> COUNTER(i, number)++
    :: else
    fi
}

/* An item is a span of a source, or none where that has no tokens. */
inline send(item) {
    home = (i + 1 + item % SOURCES) % N;
    place = item / SOURCES;
    assert(!sent[(home * N + i) * SPANS + place]); /* (a) */
    sent[(home * N + i) * SPANS + place] = true;
    FLAG(home, i, place) = MUTANT != ONE_FLAG || place == 0
}

/* Whether a pipeline sends the span that it has, or has just drawn, in this turn of its loop. */
#define SENDS (item < ITEMS && (MUTANT == HELD_SPAN -> drains : !there))
#define COMPARES (p == (N < PIPES_OF(i) -> N : PIPES_OF(i)) - 1)

/* Runs: 0 before the first one, 1 + the number of a run, more than there are behind the last one. */
proctype Pipeline(byte i; byte p) {
    byte item, asked, mine, following, home, place, start;
    bool drains, left, there;
    d_step {
        told[i] = true; /* by another CTA of the launch, or by this one before it sends */
        item = (BEGIN(p) && NUMBER(p) < ITEMS -> NUMBER(p) : ITEMS);
        drains = item < ITEMS;
        start = START(p);
        left = true
    }
    do
    :: atomic { !left && mine > RUNS_OF(i) -> break }
    :: atomic {
        left || mine <= RUNS_OF(i) ->
        there = !drains && mine <= RUNS_OF(i) && (mine == 0 || IS_THERE(i, mine - 1));
        if
        :: !drains && !there && left && (MUTANT != WAITS_FIRST || mine > RUNS_OF(i)) ->
            item = ITEM(COUNTER(i, start), start);
            take(start);
            left = item < ITEMS
        :: else
        fi;
        if
        :: SENDS && drains ->
            asked = COUNTER(i, start);
            take(start)
        :: !SENDS && mine <= RUNS_OF(i) ->
            if
            :: mine == 0 ->
                asked = COUNTER(i, RUN_TURN);
                take(RUN_TURN)
            :: else
            fi;
            following = asked + 1;
            asked = COUNTER(i, RUN_TURN);
            take(RUN_TURN)
        :: else
        fi
        };
        if
        :: atomic {
            SENDS ->
            send(item);
            if
            :: drains ->
                item = ITEM(asked, start);
                drains = item < ITEMS;
                left = drains
            :: else
            fi;
            item = (drains -> item : ITEMS);
            asked = (mine == 0 -> 0 : asked);
            there = false; home = 0; place = 0
        }
        :: atomic {
            !SENDS && mine <= RUNS_OF(i) &&
            (mine == 0 -> !COMPARES || ALL_TOLD : MUTANT == UNAWAITED || IS_THERE(i, mine - 1)) ->
            if
            :: mine > 0 ->
                assert(IS_THERE(i, mine - 1)); /* (b) */
                assert(!added[i * RUNS + mine - 1]); /* (a) */
                added[i * RUNS + mine - 1] = true
            :: else
            fi;
            mine = (following > RUNS_OF(i) -> RUNS + 1 : following);
            asked = (asked > RUNS -> RUNS : asked);
            following = 0;
            there = false
        }
        :: atomic { !SENDS && mine > RUNS_OF(i) -> skip }
        fi
    od;
    atomic {
        ended++;
        if
        :: ended == FIRST + (N - 1) * PIPES ->
            home = 0;
            do
            :: home < N * N * SPANS ->
                assert(sent[home] == (home / SPANS / N != home / SPANS % N)); /* (a) */
                home++
            :: else -> break
            od;
            home = 0;
            do
            :: home < N * RUNS -> assert(added[home] == HAS(home / RUNS)); home++ /* (a) */
            :: else -> break
            od
        :: else
        fi
    }
}

init {
    byte i, p;
    atomic {
        do
        :: i < N && p < PIPES_OF(i) -> run Pipeline(i, p); p++
        :: i < N && p == PIPES_OF(i) -> p = 0; i++
        :: i == N -> break
        od
    }
}
